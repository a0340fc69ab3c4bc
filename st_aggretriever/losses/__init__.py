"""Training losses: the composite loss of Aggretriever, its gradient-cached form, and distillation."""

from st_aggretriever.losses.aggretriever import AggretrieverLoss
from st_aggretriever.losses.cached import CachedAggretrieverLoss
from st_aggretriever.losses.distillation import Distillation

__all__ = ["AggretrieverLoss", "CachedAggretrieverLoss", "Distillation"]
