/* codes_template.h - the steps from numbers to integers and back around code_dots, for any vector width; part of
 * simd_template.h. Also needs vi_load(p), vi_store_words(p, v) (LANES numbers as 16 bits) and vi_sum(v). */

KVANT_INLINE uint32_t vi_largest(vi v)
{
    uint32_t lanes[LANES], largest = 0;
    vi_store(lanes, v);
    for (uint32_t i = 0; i < LANES; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

static KVANT_FIXED_POINT_FN(NAME(fixed_point))
{
    float products[KVANT_PAGE_TOKENS];
    vi largest = vi_set(0), sum = vi_set(0);
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += LANES) {
        vf_store_unaligned(products + i, vf_mul(vf_load(w + i), vf_load(scale + i)));
        largest = vi_max_unsigned(largest, vi_and(vi_load_float_bits(products + i), vi_set(0x7fffffff)));
    }
    float inverse, step = kvant_fixed_point_step(vi_largest(largest), limit, &inverse);
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += LANES) {
        vi whole =
            inverse > 0 ? vi_from_whole(vf_mul(vf_load_unaligned(products + i), vf_set(inverse))) : vi_set(0);
        vi_store_words(x + i, whole);
        sum = vi_add(sum, whole);
    }
    return (kvant_fixed_point){ step, vi_sum(sum) };
}

static KVANT_SCALE_DOTS_FN(NAME(scale_dots))
{
    vf step = vf_set(x.step), offset = vf_set(x.step * (float)x.sum);
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += LANES) {
        vf factor = vf_mul(step, vf_load(scale + i)), dot = vf_from_codes(vi_load(dots + i));
        vf first = zero ? vf_mul(vf_load(zero + i), offset) : vf_zero();
        vf_store(scores + i, vf_fma(dot, factor, first));
    }
}

static KVANT_ADD_DOTS_FN(NAME(add_dots))
{
    vf factor = vf_set(step), first = vf_set(zero);
    for (uint32_t i = 0; i < n; i += LANES) {
        vf sum = vf_add(vf_load(sums + i), first);
        vf_store(sums + i, vf_fma(vf_from_codes(vi_load(dots + i)), factor, sum));
    }
}
