/* unpack_kinds.h - unpack around unpack_bits(job, bits, affine) of the including file: compiles one
 * copy per bits and affine. */

KVANT_INLINE void unpack_kind(const unpack_job *job, bool affine)
{
    switch (job->layout->bits) {
    case 1: unpack_bits(job, 1, affine); return;
    case 2: unpack_bits(job, 2, affine); return;
    case 3: unpack_bits(job, 3, affine); return;
    case 4: unpack_bits(job, 4, affine); return;
    case 5: unpack_bits(job, 5, affine); return;
    case 6: unpack_bits(job, 6, affine); return;
    case 7: unpack_bits(job, 7, affine); return;
    default: unpack_bits(job, 8, affine); return;
    }
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
