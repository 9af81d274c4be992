"""Planners that are wrong on purpose, as trainers were wrong in public: each has to be found.

A check that does not find one of them proves nothing about the planner that ships.
"""
