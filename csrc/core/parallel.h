// Threads for one call at a time of one calling thread.
//
// Each calling thread has workers of its own, made at the first call that needs them and kept: they inherit its processor
// affinity, and two callers (a step in the background beside one in the foreground) do not wait for each other.
#pragma once

#include <cstdint>
#include <functional>

namespace ds {

// Run `task(i)` for every i of [0, tasks) on at most `threads` threads, the caller among them; returns when all are done.
// Tasks are taken in order as threads get free; they must not throw and must not call `parallel`.
void parallel(int64_t tasks, int32_t threads, const std::function<void(int64_t)>& task);

}  // namespace ds
