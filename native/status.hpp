// What every call of the C interface ends with: no exception may leave the library.
#pragma once

#include <exception>
#include <mutex>
#include <new>

namespace shardwise {

enum Status { done, unsupported, no_memory, failed };

template <class F> int guarded(F&& call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return no_memory;
    } catch (...) {
        return failed;
    }
}

// Keeps the first exception of many threads for the one that called them: one that left a thread,
// or the OpenMP runtime's frames, would end the process.
class FirstException {
  public:
    template <class F> void run(F&& job) noexcept {
        try {
            job();
        } catch (...) {
            std::lock_guard<std::mutex> hold(mutex);
            if (!first) first = std::current_exception();
        }
    }
    void rethrow() const {
        if (first) std::rethrow_exception(first);
    }

  private:
    std::mutex mutex;
    std::exception_ptr first;
};

}  // namespace shardwise
