// Looks into memory of the program's own before it is read: a pointer without a length, or a size
// in what it points to, can lead anywhere, and a wrong image is to be an error code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpupool::frontdoor {

// Whether all these bytes can be read now.
bool can_read(const void* at, uint64_t bytes);

// No offset within an object of this process reaches so far (47 bits of addresses on x86-64): what
// an image says beyond it is wrong, and isn't added to a pointer.
constexpr uint64_t kMaxOffset = uint64_t{1} << 46;

// The length of the text that a NUL ends; SIZE_MAX: memory ends before.
size_t text_length(const char* text);

}  // namespace gpupool::frontdoor
