// Threads: the caller's OpenMP runtime where there is one, else a small pool that sleeps.
//
// A second OpenMP runtime would spin beside torch's and take its cores; so Python hands over the
// entry point of the runtime that torch has loaded, and the very same threads do both.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.hpp"

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

    void run(Job job, void* data, int count) {
        std::lock_guard<std::mutex> one(turn);
        while ((int)threads.size() < count - 1) {
            const int index = (int)threads.size() + 1;
            threads.emplace_back([this, index] { loop(index); });
        }
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

inline Pool& pool() {
    static Pool* one = new Pool;  // never destroyed: a fork or an exit may have ended its threads
    return *one;
}

template <class F> inline void parallel(int num_threads, F&& job) {
    if (num_threads <= 1) return job(0, 1);
    auto call = [](void* data, int index, int count) { (*static_cast<F*>(data))(index, count); };
    if (!runtime().parallel) return pool().run(call, &job, num_threads);
    struct Region {
        F* job;
    } region{&job};
    runtime().parallel(
        [](void* data) {
            (*static_cast<Region*>(data)->job)(runtime().number(), runtime().count());
        },
        &region, (unsigned)num_threads, 0);
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
