/* kernels_avx512_vnni.c - the kernels that level avx512vnni adds to avx512: one instruction
 * multiplies 16-bit pairs, or fours of bytes, and adds the products. */
#include "vectors_zmm.h"

#define NAME(function) function##_avx512_vnni
#define add_pairs(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)
#define add_fours(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)

#include "code_dots_zmm.h"
#include "tile_sums_zmm.h"
#include "chunk_dots_zmm.h"
#include "trellis_dots_zmm.h"
#include "packs.h"

void kvant_kernels_init_avx512_vnni(kvant_kernels *kernels)
{
    kernels->code_dots = NAME(code_dots);
    kernels->tile_sums = NAME(tile_sums);
    kernels->chunk_dots = NAME(chunk_dots);
    kernels->trellis_dots = NAME(trellis_dots);
    kernels->trellis_values = NAME(trellis_values);
    kernels->trellis_pack = NAME(trellis_pack);
    kernels->pack_dots = NAME(pack_dots);
}
