/* vectors_ymm.h - 256-bit vectors: the operations that levels avx2 and avx2vnni share. */
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#include "../../base/attributes.h"
#include "../kernels.h"

#define LANES 8u
#define vi_count int
#define MM(op) _mm256_##op
#define MM_WHOLE(op) _mm256_##op##_si256

typedef __m256 vf;
typedef __m256i vi;

#define vi_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vi_load_repeated(p, words)                                                                 \
    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p))) /* 4 */
#define vi_store_aligned(p, v) _mm256_store_si256((__m256i *)(p), v)

#include "vectors.h"
