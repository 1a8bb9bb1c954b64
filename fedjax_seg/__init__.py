"""fedjax_seg: federated learning for medical imaging, simulated in one jitted round function."""

__version__ = "0.1.0"
