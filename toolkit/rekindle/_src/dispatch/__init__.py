"""The four tasks of a session, the loop that runs them, and the thread which that loop lives in."""
