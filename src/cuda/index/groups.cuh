/* groups.cuh - products of bytes by wgmma, for four warps together; code for sm_90a. */
#pragma once

#include "../../base/attributes.h"
#include "../ptx.cuh"

namespace kvant
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Describes the columns of a step for wgmma. 8 columns x 16 numbers are 128 bytes. The second 16
 * numbers of these columns are the next 128 bytes. */
KVANT_INLINE uint64_t columns_at(const uint8_t *at)
{
    return (uint64_t)(shared_address(at) >> 4 & 0x3fff) | (uint64_t)(128 >> 4) << 16 |
           (uint64_t)(256 >> 4) << 32;
}

#define KVANT_FOUR(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#define KVANT_EIGHT(j)                                                                             \
    KVANT_FOUR(j), KVANT_FOUR(j + 1), KVANT_FOUR(j + 2), KVANT_FOUR(j + 3), KVANT_FOUR(j + 4),     \
        KVANT_FOUR(j + 5), KVANT_FOUR(j + 6), KVANT_FOUR(j + 7)

/* Begins d += a b, for 16 rows of each warp and 32 numbers. */
KVANT_INLINE void begin_product(int (&d)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,1;"
        : KVANT_EIGHT(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

KVANT_INLINE void begin_product(int (&d)[16][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"
        "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
        "%63},{%64,%65,%66,%67},%68,1;"
        : KVANT_EIGHT(0), KVANT_EIGHT(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef KVANT_EIGHT
#undef KVANT_FOUR

KVANT_INLINE void begin_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

KVANT_INLINE void commit_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Makes the compiler compute these numbers before this point and use them only after it. */
template <int STEPS> KVANT_INLINE void hold_operands(uint32_t (&a)[STEPS][1][4])
{
    unrolled_for (int i = 0; i < STEPS; i++)
        asm volatile(""
                     : "+r"(a[i][0][0]), "+r"(a[i][0][1]), "+r"(a[i][0][2]),
                       "+r"(a[i][0][3])::"memory");
}

/* Waits for all products. Their operands and sums are not used before, because the compiler does
 * not know that they are read and written later. */
template <int N, int STEPS>
KVANT_INLINE void finish_products(int (&sums)[1][N][4], uint32_t (&a)[STEPS][1][4])
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    unrolled_for (int j = 0; j < N; j++)
        asm volatile(""
                     : "+r"(sums[0][j][0]), "+r"(sums[0][j][1]), "+r"(sums[0][j][2]),
                       "+r"(sums[0][j][3])::"memory");
    hold_operands(a);
}

/* Makes ordinary stores visible to wgmma after the next barrier. */
KVANT_INLINE void publish_columns()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#else

KVANT_INLINE void publish_columns()
{
}

#endif

} // namespace kvant
