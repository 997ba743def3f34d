/* unpack_kinds.h - unpack around unpack_bits(job, bits, affine) of the including file: compiles one
 * copy per bits and affine. */

KVANT_INLINE void unpack_kind(const unpack_job *job, bool affine)
{
#define UNPACK_BITS(bits) unpack_bits(job, bits, affine)
    KVANT_CALL_CONSTANT(job->layout->bits, 8, UNPACK_BITS)
}

static KVANT_UNPACK_FN(NAME(unpack))
{
    unpack_job job = { .layout = layout,
                       .words = page,
                       .values = values,
                       .offset = offset,
                       .tile = tile,
                       .stride =
                           layout->role == KVANT_ROLE_K ? KVANT_PAGE_TOKENS : layout->padded_dim };
    if (values)
        unpack_kind(&job, false);
    else
        unpack_kind(&job, true);
}
