"""Where a process runs: ranks, joining their process group, meshes, hang detection, brief errors, optional packages."""
