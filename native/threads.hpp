// Threads: the caller's OpenMP runtime where there is one, else a small pool that sleeps.
//
// A second OpenMP runtime would spin beside torch's and take its cores; so Python hands over the
// entry point of the runtime that torch has loaded, and the very same threads do both.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.hpp"
#include "status.hpp"

namespace shardwise {

using Job = void (*)(void*, int, int);  // data, index, number of threads
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using ThreadNumber = int (*)();

class Pool {
  public:
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex);
            stop = true;
        }
        wake.notify_all();
        for (auto& thread : threads) thread.join();
    }

    // The job must not throw. Fewer threads than asked for run it where no more can be had.
    void run(Job job, void* data, int count) {
        std::lock_guard<std::mutex> one(turn);
        count = grow(count - 1) + 1;
        {
            std::lock_guard<std::mutex> hold(mutex);
            current = {job, data, count};
            left = count - 1;
            round++;
        }
        wake.notify_all();
        job(data, 0, count);
        std::unique_lock<std::mutex> hold(mutex);
        done.wait(hold, [this] { return left == 0; });
    }

  private:
    struct Work {
        Job job;
        void* data;
        int count;
    };

    int grow(int most) try {
        while ((int)threads.size() < most) {
            const int index = (int)threads.size() + 1;
            threads.emplace_back([this, index] { loop(index); });
        }
        return most;
    } catch (const std::system_error&) {
        return (int)threads.size();
    }

    void loop(int index) {
        std::size_t seen = 0;
        for (;;) {
            Work work;
            {
                std::unique_lock<std::mutex> hold(mutex);
                wake.wait(hold, [&] { return stop || (round != seen && index < current.count); });
                if (stop) return;
                seen = round;
                work = current;
            }
            work.job(work.data, index, work.count);
            std::lock_guard<std::mutex> hold(mutex);
            if (--left == 0) done.notify_one();
        }
    }

    std::mutex mutex, turn;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    Work current = {};
    int left = 0;
    std::size_t round = 0;
    bool stop = false;
};

struct Runtime {
    GompParallel parallel = nullptr;
    ThreadNumber number = nullptr, count = nullptr;
};

inline Runtime& runtime() {
    static Runtime one;
    return one;
}

inline Pool*& present_pool() {
    static Pool* one = new Pool;  // never destroyed: an exit may have ended its threads
    return one;
}

inline Pool& pool() {
    static const int once =
        pthread_atfork(nullptr, nullptr, [] { present_pool() = new Pool; });  // threads stay behind
    (void)once;
    return *present_pool();
}

// job(index, count) on up to num_threads threads; what one of them throws is thrown here.
template <class F> inline void parallel(int num_threads, F&& job) {
    if (num_threads <= 1) return job(0, 1);
    struct Region {
        F* job;
        FirstException caught;
        void run(int index, int count) noexcept {
            caught.run([&] { (*job)(index, count); });
        }
    } region{&job, {}};
    if (runtime().parallel)
        runtime().parallel(
            [](void* data) {
                static_cast<Region*>(data)->run(runtime().number(), runtime().count());
            },
            &region, (unsigned)num_threads, 0);
    else
        pool().run([](void* data, int index, int count) {
            static_cast<Region*>(data)->run(index, count);
        }, &region, num_threads);
    region.caught.rethrow();
}

struct Range {
    i64 begin, end;
    i64 size() const { return end - begin; }
};

// Part `index` of `count` of [0, total), cut at multiples of `unit`.
inline Range part(i64 total, i64 unit, i64 index, i64 count) {
    const i64 units = (total + unit - 1) / unit;
    const i64 begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < total ? begin : total, end < total ? end : total};
}

}  // namespace shardwise
