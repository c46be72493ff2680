cpdef bytes record(int kind, int attempts, long long seq, long long due_ms, long long span)
