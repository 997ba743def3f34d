/* codes_template.h - the steps from numbers to integers and back around code_dots, for any vector width; part of
 * simd_template.h. Also needs vi_load(p), vi_float_bits(x), vi_store_words(p, v) (LANES numbers as 16 bits), vi_store_fours(p, v) (the
 * sums of lanes 4 apart), vi_largest(v) (of unsigned lanes) and vf_repeat_four(p). */

KVANT_INLINE vf product_at(const float *w, const float *scale, uint32_t i)
{
    return scale ? vf_mul(vf_load(w + i), vf_load(scale + i)) : vf_load(w + i);
}

static KVANT_FIXED_POINT_FN(NAME(fixed_point))
{
    vi largest = vi_set(0);
    for (uint32_t i = 0; i < n; i += LANES)
        largest = vi_max_unsigned(largest, vi_and(vi_float_bits(product_at(w, scale, i)), vi_set(0x7fffffff)));
    float inverse, step = kvant_fixed_point_step(vi_largest(largest), limit, &inverse);
    if (!(inverse > 0)) {
        memset(x, 0, n * sizeof *x);
        memset(sums, 0, n / KVANT_TILE * sizeof *sums);
        return step;
    }
    for (uint32_t block = 0; block < n; block += KVANT_PAGE_TOKENS) {
        vi sum = vi_set(0);
        for (uint32_t i = block; i < block + KVANT_PAGE_TOKENS; i += LANES) {
            vi whole = vi_from_whole(vf_mul(product_at(w, scale, i), vf_set(inverse)));
            vi_store_words(x + i, whole);
            sum = vi_add(sum, whole);
        }
        vi_store_fours(sums + block / KVANT_TILE, sum);
    }
    return step;
}

static KVANT_ADD_ROW_DOTS_FN(NAME(add_row_dots))
{
    vf factor = vf_set(step), other = vf_set(offset);
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
        if (kvant_layout_group_tiles(layout, group) < 4) {
            kvant_add_row_group_c(layout, group, dots, step, scale, offset, zero, sums);
            return;
        }
        for (uint32_t i = KVANT_PAGE_TOKENS * group; i < KVANT_PAGE_TOKENS * (group + 1); i += LANES) {
            vf sum = zero ? vf_fma(vf_load(zero + i), other, vf_load(sums + i)) : vf_load(sums + i);
            vf dot = vf_from_codes(vi_load(dots + i));
            vf_store(sums + i, vf_fma(dot, vf_mul(factor, vf_load(scale + i)), sum));
        }
    }
}

static KVANT_ADD_TILE_DOTS_FN(NAME(add_tile_dots))
{
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
        if (kvant_layout_group_tiles(layout, group) < 4) {
            kvant_add_tile_group_c(layout, group, dots, step, zero, sums);
            return;
        }
        vf factor = vf_repeat_four(step + 4 * group), first = vf_repeat_four(zero + 4 * group);
        for (uint32_t i = KVANT_PAGE_TOKENS * group; i < KVANT_PAGE_TOKENS * (group + 1); i += LANES) {
            vf sum = vf_add(vf_load(sums + i), first);
            vf_store(sums + i, vf_fma(vf_from_codes(vi_load(dots + i)), factor, sum));
        }
    }
}
