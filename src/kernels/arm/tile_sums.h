/* tile_sums.h - tile_sums without a tile. With 4 vectors x at a time, looking values up is a tenth
 * of the work, so a tile would cost more than it saves. */

static KVANT_TILE_SUMS_FN(NAME(tile_sums))
{
    NAME(code_dots)(layout, page, values, factors, dots, dots_stride, n);
    kvant_sum_dots_c(layout, dots, dots_stride, out, n);
}
