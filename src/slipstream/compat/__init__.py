"""DeepSpeed 0.19.8's API on top of Slipstream.

The distribution in compat/deepspeed installs the package `deepspeed`, whose modules are created from the tables in `names.py`. No
other part of Slipstream imports this folder.
"""
