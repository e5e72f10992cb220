"""The command line.  These modules import neither torch nor megatron; handlers import what they need."""
