"""What names a run of tests, in what it starts and makes: other runs share this machine."""

# A variable of the environment, set before the first test: what a test starts inherits it, however
# often it is reparented.
MARK = "ROLLOUT_TEST_RUN"
# In shared memory; the run follows.
FOLDER_OF_A_TEST = "rollout-test-"
