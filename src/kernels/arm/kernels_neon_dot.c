/* kernels_neon_dot.c - the kernels that level neondot adds to neon. FEAT_DotProd gives 16 products
 * of bytes and their sums by four in one instruction. */
#include <stdbool.h>
#include <string.h>

#include "../../base/attributes.h"
#include "../kernels.h"

#define NAME(function) function##_neon_dot
#define add_fours(sum, a, b) vdotq_s32(sum, a, b)

#include "code_dots_bytes.h"
#include "tile_sums.h"
#include "packs.h"

void kvant_kernels_init_neon_dot(kvant_kernels *kernels)
{
    kernels->code_dots = NAME(code_dots);
    kernels->tile_sums = NAME(tile_sums);
    kernels->pack_dots = NAME(pack_dots);
}
