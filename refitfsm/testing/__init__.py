"""For those who test a policy or a planner of their own. Needs Hypothesis: `pip install 'refitfsm[test]'`."""
