// What driver.cpp has of emulated.cpp.
#pragma once
#include "emulated.h"

namespace emulated {

// Runs a kernel to its end; 0, or an error of the driver's with why it came to that.
int run(const Registered& kernel, const Index& groups, const Call& call, const char** why);

}  // namespace emulated
