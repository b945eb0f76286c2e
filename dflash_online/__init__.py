"""DFlash Online: keeps a DFlash drafter matched to the target that is serving right now."""

__version__ = "0.1.0"
