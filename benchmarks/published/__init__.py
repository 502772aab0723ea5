"""The tables and figures of the papers, computed again by the planner and the simulator."""
