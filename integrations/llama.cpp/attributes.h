/* attributes.h - compiler extensions that the plug-in has next to the library's. */
#pragma once

#include "../../src/base/attributes.h"

#if !defined(__GNUC__)
#error "the llama.cpp plug-in needs GCC or Clang: it asks for its caller's address"
#endif

/* The one symbol that the shared object exports. A DLL has a list instead (libggml-kvant.map). */
#define KVP_EXPORT __attribute__((visibility("default")))

/* The address that the running function returns to. It shows which copy of ggml loads the
 * plug-in. */
#define KVP_RETURN_ADDRESS() __builtin_return_address(0)
