"""The CalRT driver, and the emulated card that stands in for the vendor's library.

May import ``caltrio`` and never ``sim`` (docs/architecture.md). The device kinds are in
:mod:`hw.emulator` and :mod:`hw.calrt`; programs open a device with :func:`hw.device.open_hw`.
"""
