"""DeepSpeed's names and behavior over Slipstream, for scripts and libraries written for DeepSpeed 0.19.8.

The distribution in compat/deepspeed installs the package `deepspeed`, whose modules are made from the table in `names.py`. Nothing
else in Slipstream knows of this folder.
"""
