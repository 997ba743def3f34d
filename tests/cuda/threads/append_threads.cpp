/* append_threads.cpp - the kernels of append.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/append.cu"

using namespace kvant;

template <int D, class Levels_, class Args> static bool add_books()
{
    return add_kernels(append_kernel<D, Levels_, Args>, append_list_kernel<D, Levels_, Args>);
}

static const bool added = add_head_dims([](auto d) {
    constexpr int D = decltype(d)::value;
    return add_books<D, Levels, PlainArgs>() && add_books<D, WideLevels, WideArgs>();
});
