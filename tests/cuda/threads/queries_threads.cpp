/* queries_threads.cpp - the kernels of queries.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/queries.cu"

using namespace kvant;

static const bool added_any = add_kernels(queries_any_kernel);
static const bool added = add_head_dims([](auto d) {
    constexpr int D = decltype(d)::value;
    constexpr int ALL = D == 256 ? 32 : D / QUARTERS;
    if constexpr (D == 256)
        return add_kernels(queries_kernel<D, ALL>, queries_kernel<D, ALL / 2>);
    else
        return add_kernels(queries_kernel<D, ALL>, query_rows_kernel<D>);
});
