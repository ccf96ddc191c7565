"""Who the ranks are: joining the process group, meshes, and the watch over peers."""
