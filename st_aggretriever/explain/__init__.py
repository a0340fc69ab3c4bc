"""Which terms stand behind a vector and a score, and where they come from in the text."""

from __future__ import annotations

from st_aggretriever.explain.scores import ScoreExplanation, explain_scores, match
from st_aggretriever.explain.texts import TextExplanation, explain_texts

__all__ = ["ScoreExplanation", "TextExplanation", "explain_scores", "explain_texts", "match"]
