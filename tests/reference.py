"""The equations of Aggretriever in plain loops, over Python floats. Imports nothing of the package.

Lin, Li, Lin: Aggretriever, TACL 2023, arXiv:2208.00511. Slow and literal on purpose: this is what the tests hold the
package to.
"""

import math


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    exponentials = [math.exp(logit - top) for logit in logits]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def log1p_relu(logits: list[float]) -> list[float]:
    return [math.log1p(max(0.0, logit)) for logit in logits]


def dot(left: list[float], right: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def term_weight(state: list[float], weight: list[float], bias: float, kind: str) -> float:
    if kind == "none":
        return 1.0
    value = dot(state, weight) + bias
    return abs(value) if kind == "abs" else value


def lexical_weights(
    token_logits: list[list[float]], weights: list[float], takes_part: list[bool], activation: str = "softmax"
) -> list[float]:
    """``v[t] = max_i w_i f(logits_i)[t]`` over the tokens of one text that take part; zeros without any."""
    vocabulary = len(token_logits[0])
    function = {"softmax": softmax, "log1p_relu": log1p_relu}[activation]
    best: list[float] = [-math.inf] * vocabulary
    for logits, weight, inside in zip(token_logits, weights, takes_part, strict=True):
        if inside:
            for term, value in enumerate(function(logits)):
                best[term] = max(best[term], weight * value)
    return [0.0] * vocabulary if not any(takes_part) else best


def tokens_that_take_part(mask: list[int], excluded: str, prompt_length: int = 0, appended: int = 1) -> list[bool]:
    """Of one text: every real token but the first, the prompt's and (``excluded="special"``) the appended ones."""
    real = [position for position, value in enumerate(mask) if value]
    chosen = [position for position in real if position != real[0] and position >= real[0] + prompt_length]
    if excluded == "special":
        chosen = [position for position in chosen if position <= real[-1] - appended]
    return [position in chosen for position in range(len(mask))]


def ids_after_remainder(vocabulary: int, width: int, remainder: str) -> list[int]:
    """The ids that stay, in order: ``"drop"`` loses the first ``V mod m`` where these are at most 1,000."""
    over = vocabulary % width
    first = over if remainder == "drop" and over <= 1000 else 0
    return list(range(first, vocabulary))


def aggregate(lexical: list[float], dim: int, aggregation: str, remainder: str = "pad") -> list[float]:
    """agg* (``"signed"``), agg+ (``"positive"``) or the slice mean of one text's lexical weights, strided slices."""
    width = 2 * dim if aggregation == "signed" else dim
    kept = ids_after_remainder(len(lexical), width, remainder)
    columns: list[list[float]] = [[] for _ in range(width)]
    for position, term in enumerate(kept):
        columns[position % width].append(lexical[term])
    if aggregation == "mean":
        return [math.fsum(column) / len(column) for column in columns]
    if aggregation == "positive":
        return [max(column) for column in columns]
    result = []
    for slice_ in range(dim):
        positive, negative = max(columns[2 * slice_]), max(columns[2 * slice_ + 1])
        result.append(positive if positive > negative else -negative)
    return result


def negative_log_likelihood(
    queries: list[list[float]],
    passages: list[list[float]],
    scale: float = 1.0,
    left_out: dict[int, set[int]] | None = None,
) -> float:
    """Mean over queries of ``-log softmax(scale q . p)[own positive]``; passage i is query i's positive.

    The softmax of query i is over the passages that are not in ``left_out[i]``.
    """
    losses = []
    for index, query in enumerate(queries):
        without = (left_out or {}).get(index, set())
        kept = [position for position in range(len(passages)) if position not in without]
        shares = softmax([scale * dot(query, passages[position]) for position in kept])
        losses.append(-math.log(shares[kept.index(index)]))
    return math.fsum(losses) / len(losses)


def fold(lexical: list[float], dim: int, signed: bool = True) -> list[float]:
    """Of the slices n, n + dim, n + 2 dim, ... the largest magnitude (of equal ones the negative), or the maximum."""
    meeting = [lexical[slice_::dim] for slice_ in range(dim)]
    if not signed:
        return [max(values) for values in meeting]
    return [max(values, key=lambda value: (abs(value), math.copysign(1.0, -value))) for values in meeting]


def listwise_kl(teacher: list[float], student: list[float], temperature: float) -> float:
    """``T^2 sum_k p_k log(p_k / q_k)`` with ``p = softmax(teacher / T)``, ``q = softmax(student / T)``."""
    p, q = (softmax([score / temperature for score in scores]) for scores in (teacher, student))
    return temperature**2 * math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def margin_mse(teacher: list[float], student: list[float]) -> float:
    """Mean over the negatives of the squared difference of the margins ``s_0 - s_k`` and ``t_0 - t_k``."""
    errors = [(student[0] - s) - (teacher[0] - t) for s, t in zip(student[1:], teacher[1:], strict=True)]
    return math.fsum(error * error for error in errors) / len(errors)
