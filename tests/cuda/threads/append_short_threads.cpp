/* append_short_threads.cpp - the kernels of append_short.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/append_short.cu"

using namespace kvant;

template <int D, class Book> static bool add_book()
{
    return add_kernels(append_short_kernel<D, Book, true>, append_short_kernel<D, Book, false>,
                       append_several_kernel<D, Book>);
}

static const bool added = add_head_dims([](auto d) {
    constexpr int D = decltype(d)::value;
    return add_book<D, OpenBook>() && add_book<D, NarrowBook>() && add_book<D, WideBook>();
});
