/* centers_threads.cpp - the kernels of centers.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "centers.cu"

using namespace kvant;

static const bool added = add_kernels(
    center_rows_kernel, page_offsets_kernel<FewOffsets>, page_offsets_kernel<ManyOffsets<128>>,
    page_offsets_kernel<ManyOffsets<256>>, page_offsets_kernel<ManyOffsets<512>>);
