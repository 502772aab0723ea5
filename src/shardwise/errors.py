"""The errors a user can cause; each says in one sentence what is wrong and what would be right."""


class ShardwiseError(ValueError):
    """A model, plan, file or shape that cannot be used as asked."""


class CaptureError(ShardwiseError):
    """A model that cannot be turned into a layer graph."""


class PlanError(ShardwiseError):
    """A plan that does not fit the model, the shape or the workers."""
