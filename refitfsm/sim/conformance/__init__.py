"""What SGLang is taken to do, as checks that run on any server: the contract of the simulator.

The same checks run on the simulator in process, on the simulator over HTTP, and on real servers on CPU
and GPU. Where a simulator and a real server differ, the simulator is wrong.
"""
