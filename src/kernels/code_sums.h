/* code_sums.h - a vector of sums from dots (kvant_code_sums), for any vector width. The including
 * file defines vf, vi, vf_load, vf_set, vf_add, vf_mul, vf_fma, vf_from_codes. */

/* The sums of LANES rows from `first` on for one vector x. Sums so far are at `sums`. */
KVANT_INLINE vf code_sum(vi dots, vf step, vf offset, const kvant_code_sums *out, size_t first,
                         const float *sums)
{
    vf rest = out->zero ? vf_mul(vf_load(out->zero + first), offset) : offset;
    vf factor = out->scale ? vf_mul(step, vf_load(out->scale + first)) : step;
    return vf_fma(vf_from_codes(dots), factor, out->add ? vf_add(vf_load(sums), rest) : rest);
}
