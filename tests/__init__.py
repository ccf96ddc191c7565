import os

if os.environ.get("SLIPSTREAM_TESTS_ON_GPU") == "emulated":  # in every process of tests, before it asks torch for a device
    from tests import emulation

    emulation.install()
