/* barriers.cuh - barriers in shared memory (mbarrier), and copies of pages that complete on one.
 *
 * A barrier has phases 0, 1, 2, ..., and a phase ends when all expected threads have arrived. A
 * warp arrives with one lane, after __syncwarp. A thread that waits for phase i must begin to wait
 * before phase i + 1 ends. On sm_90 one lane starts a bulk copy. Older devices have no bulk copies,
 * so every thread copies its pieces of 16 bytes and arrives when they have been copied. */
#pragma once

#include "../ptx.cuh"
#include "operands.cuh"

namespace kvant
{

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;
#else
constexpr int COPY_ARRIVALS = GROUP_THREADS;
#endif

KVANT_INLINE void init_barrier(uint64_t &barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
                 : "memory");
}

/* Makes initialised barriers visible to copies; other threads need __syncthreads. */
KVANT_INLINE void publish_barriers()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/* Lanes of a warp that arrive. One is enough, after __syncwarp. racecheck only counts the accesses
 * of the arriving lane (tests/cuda/racecheck_patterns.cu), so a build for racecheck sets 32. */
#ifndef KVANT_WARP_ARRIVALS
#define KVANT_WARP_ARRIVALS 1
#endif

/* A warp arrives. Threads that wait then see everything that its lanes wrote before. */
KVANT_INLINE void arrive_at(uint64_t &barrier, int lane)
{
    __syncwarp();
    if (lane < KVANT_WARP_ARRIVALS)
        asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(
                         shared_address(&barrier))
                     : "memory");
}

/* Waits until the phase ends. */
KVANT_INLINE void barrier_wait(uint64_t &barrier, int phase)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVANT_TRY_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define KVANT_TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{\n.reg .pred done;\n"
                 "again: " KVANT_TRY_WAIT " done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
                 "r"(phase & 1)
                 : "memory");
#undef KVANT_TRY_WAIT
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
KVANT_INLINE void expect_bytes(uint64_t &barrier, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
        "r"(bytes)
        : "memory");
}

KVANT_INLINE void copy_bytes(void *to, const void *from, uint32_t bytes, uint64_t &barrier, int)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}
#else
KVANT_INLINE void copy_bytes(void *to, const void *from, uint32_t bytes, uint64_t &, int thread)
{
    for (uint32_t i = 16 * thread; i < bytes; i += 16 * GROUP_THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i),
                     "l"(static_cast<const uint8_t *>(from) + i)
                     : "memory");
}
#endif

/* Copies two pieces from device memory. All threads of a warpgroup call it, and the copy arrives at
 * the barrier when its bytes are there. from NULL: leaves this piece out. */
KVANT_INLINE void copy_two(void *to, const void *from, uint32_t bytes, void *to2, const void *from2,
                           uint32_t bytes2, uint64_t &barrier, int thread)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (thread != 0)
        return;
    expect_bytes(barrier, (from ? bytes : 0) + (from2 ? bytes2 : 0));
#endif
    if (from)
        copy_bytes(to, from, bytes, barrier, thread);
    if (from2)
        copy_bytes(to2, from2, bytes2, barrier, thread);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier))
                 : "memory");
#endif
}

KVANT_INLINE void copy_page(void *to, const void *from, uint32_t bytes, uint64_t &barrier,
                            int thread)
{
    copy_two(to, from, bytes, nullptr, nullptr, 0, barrier, thread);
}

} // namespace kvant
