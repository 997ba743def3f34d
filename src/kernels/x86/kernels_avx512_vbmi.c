/* kernels_avx512_vbmi.c - the kernels that level avx512vbmi adds to avx512vnni. One look-up among
 * 64 bytes covers all levels of a trellis code, and the look-up of a vector index's codes needs no
 * masks. */
#include "vectors_zmm.h"

#define NAME(function) function##_avx512_vbmi
#define add_pairs(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)
#define add_fours(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#define look_up_bytes(table, v) _mm512_permutexvar_epi8(v, table)

#include "trellis_dots_zmm.h"
#include "packs.h"

void kvant_kernels_init_avx512_vbmi(kvant_kernels *kernels)
{
    kernels->trellis_dots = NAME(trellis_dots);
    kernels->trellis_values = NAME(trellis_values);
    kernels->trellis_pack = NAME(trellis_pack);
    kernels->pack_dots = NAME(pack_dots);
}
