/* threads.cpp - runs the blocks of a kernel: see cuda_runtime.h and launches.h.
 *
 * Ends the program when a kernel hangs, that is when threads wait and none can go on, or when a
 * block does not end. */
#include <setjmp.h>
#include <ucontext.h>

#include <cstdarg>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, gridDim, blockDim;

/* A kernel's dynamic shared memory, under the names that kernels give it. */
namespace kvant
{
alignas(128) thread_local uint8_t raw[MOST_SHARED];
alignas(16) thread_local uint8_t shared[99 << 10];
thread_local double inverse_space[(99 << 10) / sizeof(double)];
} // namespace kvant

namespace
{

constexpr unsigned STACK = 1 << 18;
constexpr size_t FREE_SHARED = 48 << 10; /* bytes that a kernel has without asking for them */

/* A block of the largest case goes on some million times. With this number, a block that does not
 * end is found in seconds. */
constexpr uint64_t MOST_STEPS = (uint64_t)1 << 27;

[[noreturn]] void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    abort();
}

/* Threads that wait for each other: how many of them wait, and how often all of them did. */
struct Meeting {
    unsigned size, n_waiting, n_times;
};

struct Warp {
    Meeting meeting;
    /* of this exchange and the one before, which lanes still read */
    alignas(64) unsigned char exchanged[2][LANES * MOST_EXCHANGED];
    unsigned n_exchanges[LANES];
};

/* setcontext also sets signals, by a system call each time. So a context begins with it, and then
 * goes on by _longjmp. */
struct Thread {
    ucontext_t beginning;
    jmp_buf here;
    std::unique_ptr<char[]> stack;
    const Meeting *waits_for; /* NULL: it runs */
    unsigned n_times, n_counts;
    bool begun, ended;
};

/* The thread that goes on next: the position of its warp, and its own in the warp, in the order of
 * the block. */
struct Position {
    unsigned n_threads, warp, lane;
    bool backwards, warp_went_on, block_went_on;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting meeting;
    int counts[3]; /* of this count, the one before, which threads still read, and the next one */
    uint64_t n_steps;
    Position at;
    jmp_buf caller;
    kernel_call *call;
    const void *kernel;
    void **parameters;
} block;

struct Kernel {
    kernel_call *call;
    size_t shared;
};

std::map<const void *, Kernel> &kernels()
{
    static std::map<const void *, Kernel> all;
    return all;
}

Thread &own_thread()
{
    return block.threads[threadIdx.x];
}

Warp &own_warp()
{
    return block.warps[threadIdx.x / LANES];
}

/* Goes to the next warp, or again to the same warp if one of its threads went on. False: no thread
 * of the block went on. */
bool next_warp(Position &at)
{
    const unsigned n_warps = (at.n_threads + LANES - 1) / LANES;
    at.lane = 0;
    if (!at.warp_went_on && ++at.warp == n_warps) {
        at.warp = 0;
        if (!at.block_went_on)
            return false;
        at.block_went_on = false;
    }
    at.warp_went_on = false;
    return true;
}

/* The number of the thread; n_threads behind the last one of the warp. */
unsigned thread_of(const Position &at)
{
    const unsigned n_warps = (at.n_threads + LANES - 1) / LANES,
                   first = LANES * (at.backwards ? n_warps - 1 - at.warp : at.warp),
                   n = std::min(at.n_threads - first, (unsigned)LANES);
    return at.lane >= n ? at.n_threads : first + (at.backwards ? n - 1 - at.lane : at.lane);
}

bool can_go_on(const Thread &thread)
{
    return !thread.ended && !(thread.waits_for && thread.waits_for->n_times == thread.n_times);
}

/* Goes on with the next thread that does not wait, or with the caller of the block. */
[[noreturn]] void go_on()
{
    Position &at = block.at;
    if (++block.n_steps > MOST_STEPS)
        fail("a kernel does not end: the threads of block (%u, %u, %u) waited %llu times\n",
             blockIdx.x, blockIdx.y, blockIdx.z, (unsigned long long)block.n_steps);
    do {
        for (unsigned i; (i = thread_of(at)) < at.n_threads;) {
            Thread &thread = block.threads[i];
            at.lane++;
            if (!can_go_on(thread))
                continue;
            at.warp_went_on = at.block_went_on = true;
            thread.waits_for = nullptr;
            threadIdx.x = i;
            if (thread.begun)
                _longjmp(thread.here, 1);
            thread.begun = true;
            setcontext(&thread.beginning);
        }
    } while (next_warp(at));
    _longjmp(block.caller, 1);
}

/* Lets the threads go on if all of them wait. */
bool let_go(Meeting &meeting)
{
    if (meeting.n_waiting < meeting.size)
        return false;
    meeting.n_waiting = 0;
    meeting.n_times++;
    return true;
}

void wait(Meeting &meeting)
{
    Thread &own = own_thread();
    own.n_times = meeting.n_times;
    meeting.n_waiting++;
    if (let_go(meeting))
        return;
    own.waits_for = &meeting;
    if (_setjmp(own.here) == 0)
        go_on();
}

/* A block's barrier does not wait for threads that have ended; a warp's barrier names its lanes. */
void run_thread()
{
    block.call(block.kernel, block.parameters);
    own_thread().ended = true;
    block.meeting.size--;
    let_go(block.meeting);
    go_on();
}

void begin(unsigned threads, bool backwards)
{
    if (block.threads.size() < threads)
        block.threads.resize(threads);
    block.warps.assign((threads + LANES - 1) / LANES, Warp{});
    block.meeting = { threads, 0, 0 };
    block.n_steps = 0;
    block.at = { threads, 0, 0, backwards, false, false };
    std::fill(std::begin(block.counts), std::end(block.counts), 0);
    for (unsigned i = 0; i < threads; i++) {
        Thread &thread = block.threads[i];
        if (!thread.stack)
            thread.stack.reset(new char[STACK]);
        thread.waits_for = nullptr;
        thread.begun = thread.ended = false;
        thread.n_counts = 0;
        getcontext(&thread.beginning);
        thread.beginning.uc_stack.ss_sp = thread.stack.get();
        thread.beginning.uc_stack.ss_size = STACK;
        makecontext(&thread.beginning, run_thread, 0);
        block.warps[i / LANES].meeting.size++;
    }
}

void run_block(unsigned threads, size_t shared, bool backwards)
{
    /* not zeros, which might do */
    memset(kvant::raw, 0xff, shared);
    memset(kvant::shared, 0xff, std::min(shared, sizeof kvant::shared));
    memset(kvant::inverse_space, 0xff, std::min(shared, sizeof kvant::inverse_space));
    begin(threads, backwards);
    if (_setjmp(block.caller) == 0)
        go_on();
    for (unsigned i = 0; i < block.at.n_threads; i++)
        if (!block.threads[i].ended)
            fail("a kernel hangs: thread %u of block (%u, %u, %u) waits for the threads of its %s, "
                 "of which some wait elsewhere or have ended\n",
                 i, blockIdx.x, blockIdx.y, blockIdx.z,
                 block.threads[i].waits_for == &block.meeting ? "block" : "warp");
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

void *exchange_room()
{
    Warp &warp = own_warp();
    return warp.exchanged[warp.n_exchanges[own_lane()]++ % 2];
}

int __syncthreads_count(bool own)
{
    const unsigned at = own_thread().n_counts++ % 3;
    block.counts[(at + 1) % 3] = 0;
    block.counts[at] += own;
    __syncthreads();
    return block.counts[at];
}

void add_kernel(const void *kernel, kernel_call *call)
{
    kernels()[kernel] = Kernel{ call, FREE_SHARED };
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int bytes)
{
    kernels().at(kernel).shared = (size_t)bytes;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **parameters,
                             size_t shared, cudaStream_t)
{
    static unsigned n_blocks; /* launches of one block also run in both orders */
    const Kernel &known = kernels().at(kernel);
    if (shared > known.shared || threads.x > 1024 || grid.x * grid.y * grid.z == 0)
        return cudaErrorInvalidValue;
    block.call = known.call;
    block.kernel = kernel;
    block.parameters = parameters;
    gridDim = grid;
    blockDim = threads;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
        blockIdx = { i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y };
        const bool backwards = n_blocks++ % 2;
        /* Memory of the preceding block is not there: a number that is read too early is wrong. */
        std::thread(run_block, threads.x, shared, backwards).join();
    }
    return cudaSuccess;
}
