"""Where a process runs: who the ranks are, joining their group, meshes, the watch over peers, brief errors, optional packages."""
