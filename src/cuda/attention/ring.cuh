/* ring.cuh - a warp's ring of shared-memory slots, filled ahead of use with pairs of pages from
 * device memory.
 *
 * A warp fills slot i mod STAGES with item i, a K page and its V page, and waits for items in
 * order. On sm_90 one lane starts two bulk copies that complete on an mbarrier, so the copies cost
 * the warp next to nothing. Older devices have no bulk copies: every lane starts its 16-byte pieces
 * (cp.async), and groups are counted instead of barriers. Knows nothing of the contents of pages.
 *
 * SPLIT: the two pages have separate barriers, or groups. So a ring of one slot takes the next K
 * page while the warp works on the V page. Groups are then counted in this order: K page of an
 * item, its V page, K page of the next item. An empty group stands for a next item that does not
 * exist yet. */
#pragma once

#include "../ptx.cuh"

namespace kvant
{

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int STAGES, int SLOT, int V_OFFSET, bool SPLIT> struct Ring {
    static constexpr bool COUNTS = false; /* items asked for instead of barriers */
    uint32_t data, barriers;              /* shared addresses */
    uint64_t policy;
    int lane;

    __device__ void init(uint8_t *slots, void *barrier_space, int lane_)
    {
        data = shared_address(slots);
        barriers = shared_address(barrier_space);
        lane = lane_;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (lane == 0) {
            for (int i = 0; i < (SPLIT ? 2 : 1) * STAGES; i++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i));
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    KVANT_INLINE void copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t barrier)
    {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], %4;" ::"r"(to),
            "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
            : "memory");
    }

    KVANT_INLINE void expect(uint32_t barrier, uint32_t bytes)
    {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
    }

    KVANT_INLINE void fill(int slot, const uint8_t *k, uint32_t k_bytes, const uint8_t *v,
                           uint32_t v_bytes)
    {
        if constexpr (SPLIT) {
            fill_one(slot, 0, k, k_bytes);
            fill_one(slot, 1, v, v_bytes);
        } else if (lane == 0) {
            uint32_t barrier = barriers + 8 * slot, to = data + slot * SLOT;
            expect(barrier, k_bytes + v_bytes);
            copy(to, k, k_bytes, barrier);
            copy(to + V_OFFSET, v, v_bytes, barrier);
        }
    }

    /* SPLIT: the K page (0) or the V page (1) */
    KVANT_INLINE void fill_one(int slot, int which, const uint8_t *page, uint32_t bytes)
    {
        static_assert(SPLIT, "one barrier for both pages");
        const uint32_t barrier = barriers + 16 * slot + 8 * which;
        if (lane == 0) {
            expect(barrier, bytes);
            copy(data + slot * SLOT + which * V_OFFSET, page, bytes, barrier);
        }
    }

    /* A slot that takes no pages: all that can be done ahead for these two is to bring them as near
     * as the second-level cache. */
    KVANT_INLINE void fill_none(int slot, const uint8_t *k, const uint8_t *v, uint32_t bytes)
    {
        if (lane == 0) {
            for (int i = 0; i < (SPLIT ? 2 : 1); i++)
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(
                                 barriers + (SPLIT ? 16 : 8) * slot + 8 * i)
                             : "memory");
            ask(k, bytes);
            ask(v, bytes);
        }
    }

    /* By any lane. */
    KVANT_INLINE void ask(const uint8_t *page, uint32_t bytes) const
    {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(page), "r"(bytes)
                     : "memory");
    }

    KVANT_INLINE void skip()
    {
    }

    /* The slot was written with ordinary stores since it was last filled: order them before the
     * next copy. */
    KVANT_INLINE void fence_writes()
    {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    KVANT_INLINE void wait_at(uint32_t barrier, uint32_t parity)
    {
        asm volatile("{\n.reg .pred done;\n"
                     "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(barrier),
                     "r"(parity)
                     : "memory");
    }

    /* For both pages, or (SPLIT) for K. */
    KVANT_INLINE void wait(int slot, uint32_t parity)
    {
        wait_at(barriers + (SPLIT ? 16 : 8) * slot, parity);
    }

    KVANT_INLINE void wait_values(int slot, uint32_t parity)
    {
        wait_at(barriers + 16 * slot + 8, parity);
    }
};

#else

template <int STAGES, int SLOT, int V_OFFSET, bool SPLIT> struct Ring {
    static constexpr bool COUNTS = true;
    uint32_t data;
    int lane;

    __device__ void init(uint8_t *slots, void *, int lane_)
    {
        data = shared_address(slots);
        lane = lane_;
    }

    KVANT_INLINE void copy(uint32_t to, const uint8_t *from, uint32_t bytes)
    {
        for (uint32_t at = lane * 16; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                         : "memory");
    }

    KVANT_INLINE void fill(int slot, const uint8_t *k, uint32_t k_bytes, const uint8_t *v,
                           uint32_t v_bytes)
    {
        copy(data + slot * SLOT, k, k_bytes);
        if (SPLIT)
            skip();
        fill_one(slot, 1, v, v_bytes);
    }

    KVANT_INLINE void fill_one(int slot, int which, const uint8_t *page, uint32_t bytes)
    {
        copy(data + slot * SLOT + which * V_OFFSET, page, bytes);
        skip();
    }

    KVANT_INLINE void fill_none(int, const uint8_t *, const uint8_t *, uint32_t)
    {
        skip();
    }

    KVANT_INLINE void ask(const uint8_t *, uint32_t) const
    {
    }

    /* Ends a group: one an item and, SPLIT, page, also when there is none left, so that wait can
     * count. */
    KVANT_INLINE void skip()
    {
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    KVANT_INLINE void fence_writes()
    {
    }

    KVANT_INLINE void wait(int, uint32_t)
    {
        asm volatile("cp.async.wait_group %0;" ::"n"(SPLIT ? 1 : STAGES - 1) : "memory");
        __syncwarp();
    }

    KVANT_INLINE void wait_values(int, uint32_t)
    {
        wait(0, 0);
    }
};

#endif

} // namespace kvant
