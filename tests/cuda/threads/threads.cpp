/* threads.cpp - see cuda_runtime.h. */
#include "cuda_runtime.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <memory>
#include <vector>

dim3 threadIdx(0), blockIdx(0), gridDim(1);

namespace
{

constexpr unsigned WIDTH = 32, STACK = 1 << 18;

/* Threads that wait for each other: how many of them wait, and how often all of them did. */
struct Meeting {
    unsigned size, n_waiting, n_times;
};

struct Warp {
    Meeting meeting;
    uint64_t numbers[2][WIDTH]; /* of this exchange and the one before, which lanes still read */
    unsigned n_exchanges[WIDTH];
};

/* swapcontext also saves signals, by a system call each time. So a context begins with it, and
 * then goes on by _longjmp. */
struct Thread {
    ucontext_t beginning;
    jmp_buf here;
    std::unique_ptr<char[]> stack;
    const Meeting *waits_for; /* NULL: it runs */
    unsigned n_times;
    bool begun, ended;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting meeting;
    ucontext_t beginning;
    jmp_buf caller;
    void (*call)(const void *kernel, void **parameters);
    const void *kernel;
    void **parameters;
} block;

void wait(Meeting &meeting)
{
    Thread &own = block.threads[threadIdx.x];
    own.n_times = meeting.n_times;
    if (++meeting.n_waiting == meeting.size) {
        meeting.n_waiting = 0;
        meeting.n_times++;
        return;
    }
    own.waits_for = &meeting;
    if (_setjmp(own.here) == 0)
        _longjmp(block.caller, 1);
}

Warp &own_warp()
{
    return block.warps[threadIdx.x / WIDTH];
}

void run_thread()
{
    block.call(block.kernel, block.parameters);
    block.threads[threadIdx.x].ended = true;
    _longjmp(block.caller, 1);
}

void begin(unsigned threads)
{
    if (block.threads.size() < threads)
        block.threads.resize(threads);
    block.warps.assign((threads + WIDTH - 1) / WIDTH, Warp{});
    block.meeting = { threads, 0, 0 };
    for (unsigned i = 0; i < threads; i++) {
        Thread &thread = block.threads[i];
        if (!thread.stack)
            thread.stack.reset(new char[STACK]);
        thread.waits_for = nullptr;
        thread.begun = thread.ended = false;
        getcontext(&thread.beginning);
        thread.beginning.uc_stack.ss_sp = thread.stack.get();
        thread.beginning.uc_stack.ss_size = STACK;
        makecontext(&thread.beginning, run_thread, 0);
        block.warps[i / WIDTH].meeting.size++;
    }
}

/* Runs a thread as far as it goes. False: it ended before, or waits. */
bool go_on(unsigned i)
{
    Thread &thread = block.threads[i];
    if (thread.ended || (thread.waits_for && thread.waits_for->n_times == thread.n_times))
        return false;
    thread.waits_for = nullptr;
    threadIdx.x = i;
    if (_setjmp(block.caller) != 0)
        return true;
    if (thread.begun)
        _longjmp(thread.here, 1);
    thread.begun = true;
    swapcontext(&block.beginning, &thread.beginning);
    return true;
}

/* Runs the threads of a warp until all of them wait for other warps. False: they did before. */
bool run_warp(unsigned warp, unsigned threads, bool backwards)
{
    const unsigned first = warp * WIDTH, left = threads - first, n = left < WIDTH ? left : WIDTH;
    bool any = false;
    for (bool more = true; more; any = any || more) {
        more = false;
        for (unsigned i = 0; i < n; i++)
            more = go_on(first + (backwards ? n - 1 - i : i)) || more;
    }
    return any;
}

/* Without a thread that can go on, threads of a block wait for a thread that has ended. */
void run(unsigned threads, bool backwards)
{
    const unsigned n = (threads + WIDTH - 1) / WIDTH;
    begin(threads);
    for (bool any = true; any;) {
        any = false;
        for (unsigned i = 0; i < n; i++)
            any = run_warp(backwards ? n - 1 - i : i, threads, backwards) || any;
    }
    for (unsigned i = 0; i < threads; i++)
        if (!block.threads[i].ended)
            abort();
}

} // namespace

void __syncthreads()
{
    wait(block.meeting);
}

void __syncwarp()
{
    wait(own_warp().meeting);
}

uint64_t exchange(uint64_t own, int lane)
{
    Warp &warp = own_warp();
    const unsigned at = threadIdx.x % WIDTH, now = warp.n_exchanges[at]++ % 2;
    warp.numbers[now][at] = own;
    __syncwarp();
    return warp.numbers[now][lane];
}

bool __all_sync(unsigned mask, bool own)
{
    bool all = true;
    for (int lane = 0; lane < (int)WIDTH; lane++)
        all = __shfl_sync(mask, own, lane) && all;
    return all;
}

void run_blocks(dim3 grid, unsigned threads, void (*call)(const void *kernel, void **parameters),
                const void *kernel, void **parameters)
{
    block.call = call;
    block.kernel = kernel;
    block.parameters = parameters;
    gridDim = grid;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
        blockIdx = { i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y };
        run(threads, i % 2);
    }
}
