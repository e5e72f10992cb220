"""The command line.  Importing these modules loads neither torch nor megatron; handlers import what they need."""
