/* kernels_avx512_vbmi.c - the kernels that level avx512vbmi adds to avx512vnni: one look-up among
 * 64 bytes covers all levels of a trellis code. */
#include "vectors_zmm.h"

#define NAME(function) function##_avx512_vbmi
#define add_pairs(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)

#include "trellis_dots_zmm.h"

void kvant_kernels_init_avx512_vbmi(kvant_kernels *kernels)
{
    kernels->trellis_dots = NAME(trellis_dots);
}
