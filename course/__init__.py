"""The tools for teaching: what students write, how many points it brings, and hints."""
