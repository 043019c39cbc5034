"""The place of the CalRT driver. It holds no device yet: ``caltrio devices`` lists what there is.

What goes here may import ``caltrio`` and never ``sim`` (docs/architecture.md).
"""
