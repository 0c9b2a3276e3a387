"""The stream log: one append-only log per response, written by the lease holder, read by anyone, from anywhere."""
