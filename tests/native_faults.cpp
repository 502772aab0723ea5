// What happens to exceptions, threads and workspaces when a kernel fails; tests/test_kernel_faults.py
// compiles and runs this. Ends with the number of the first check that does not hold.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include "scratch.hpp"
#include "threads.hpp"

using namespace shardwise;

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

constexpr int num_threads = 3;

template <class Error> int status_of_throwing(int thrower, Error error) {
    return guarded([&] {
        parallel(num_threads, [&](int index, int) {
            if (index == thrower || thrower < 0) throw error;
        });
        return done;
    });
}

bool all_run() {
    std::atomic<int> seen{0}, count{0};
    parallel(num_threads, [&](int index, int total) { seen += index + 1, count = total; });
    return count >= 1 && seen == count * (count + 1) / 2;
}

bool exceptions_become_statuses() {
    for (int thrower = -1; thrower < num_threads; thrower++) {
        if (status_of_throwing(thrower, std::bad_alloc()) != no_memory || !all_run()) return false;
        if (status_of_throwing(thrower, std::runtime_error("")) != failed || !all_run()) return false;
    }
    return true;
}

bool a_block_comes_back_when_its_kernel_throws(bool keep) {
    Arena arena;
    const int status = guarded([&] {
        const Lease block(arena, 1 << 16, keep);
        throw std::bad_alloc();
        return done;
    });
    const std::size_t peak = arena.peak_bytes();
    const Lease again(arena, 1 << 16, keep);
    return status == no_memory && peak == 1 << 16 && arena.peak_bytes() == peak;
}

bool the_own_threads_work_after_a_fork() {
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit(all_run() ? 0 : 1);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main() {
    if (!all_run()) return 1;
    if (!exceptions_become_statuses()) return 2;
    if (!the_own_threads_work_after_a_fork()) return 3;
    runtime() = {GOMP_parallel, omp_get_thread_num, omp_get_num_threads};
    if (!all_run()) return 4;
    if (!exceptions_become_statuses()) return 5;
    if (!a_block_comes_back_when_its_kernel_throws(true)) return 6;
    if (!a_block_comes_back_when_its_kernel_throws(false)) return 7;
    return 0;
}
