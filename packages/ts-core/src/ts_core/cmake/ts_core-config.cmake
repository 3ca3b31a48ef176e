# Shared build rules of TrainStream's native packages.
#
#   find_package(ts_core CONFIG REQUIRED NO_DEFAULT_PATH PATHS ...)
#   ts_setup()                      # macro, at file scope: languages, Python, nanobind
#   ts_add_module(_C ts_quant       # module name, Python package it is installed into
#     BINDINGS csrc/bindings.cpp
#     ISA_SOURCES csrc/cpu/nf4.cpp  # compiled once per instruction set
#     CPU_SOURCES ...               # compiled once, plain
#     CUDA_SOURCES csrc/cuda/nf4.cu)
#
# Cache variables: TS_WITH_CUDA = AUTO | ON | OFF, TS_CUDA_ARCHITECTURES = list ("90a", "80;90a").
# Environment: TS_WITH_CUDA and TS_CUDA_ARCHITECTURES set the defaults of the two; CUDA_HOME, CUDA_PATH and
# TORCH_CUDA_ARCH_LIST are honoured.

set(TS_CORE_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../include")

macro(ts_setup)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release)
  endif()
  set(CMAKE_CXX_STANDARD 17)
  set(CMAKE_CXX_STANDARD_REQUIRED ON)
  set(CMAKE_CXX_EXTENSIONS OFF)
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  set(CMAKE_CXX_VISIBILITY_PRESET hidden)
  set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

  set(_ts_cuda_default AUTO)
  if(DEFINED ENV{TS_WITH_CUDA})
    set(_ts_cuda_default "$ENV{TS_WITH_CUDA}")
  endif()
  set(TS_WITH_CUDA "${_ts_cuda_default}" CACHE STRING "Build CUDA kernels: AUTO, ON or OFF")
  set(TS_CUDA_ARCHITECTURES "$ENV{TS_CUDA_ARCHITECTURES}" CACHE STRING "CUDA architectures, empty: chosen")
  set(TS_HAVE_CUDA OFF)
  if(NOT TS_WITH_CUDA STREQUAL "OFF")
    _ts_find_nvcc()
    include(CheckLanguage)
    # An architecture must be known before the language is enabled: CMake's own guess fits no card.
    _ts_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
      set(CMAKE_CUDA_STANDARD 17)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(TS_HAVE_CUDA ON)
      message(STATUS "TrainStream: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
    elseif(TS_WITH_CUDA STREQUAL "ON")
      message(FATAL_ERROR "TS_WITH_CUDA=ON, but no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME")
    else()
      message(STATUS "TrainStream: no CUDA compiler, building the CPU kernels only")
    endif()
  endif()
  # SABIModule is asked for by nanobind's split mode on Windows only.
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(nanobind CONFIG REQUIRED)
endmacro()

macro(_ts_find_nvcc)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    foreach(_ts_home "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
      if(_ts_home AND EXISTS "${_ts_home}/bin/nvcc")
        set(CMAKE_CUDA_COMPILER "${_ts_home}/bin/nvcc")
        break()
      endif()
    endforeach()
  endif()
endmacro()

# Named list, else TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX"), else the cards of this machine, else a list that
# covers Ampere to Hopper natively and newer cards through PTX.
function(_ts_cuda_architectures out)
  set(archs "${TS_CUDA_ARCHITECTURES}")
  if(NOT archs AND DEFINED ENV{TORCH_CUDA_ARCH_LIST})
    string(REGEX REPLACE "[ ,]+" ";" archs "$ENV{TORCH_CUDA_ARCH_LIST}")
    list(TRANSFORM archs REPLACE "\\+PTX" "")
    list(TRANSFORM archs REPLACE "\\." "")
  endif()
  if(NOT archs)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE caps ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" caps "${caps}")
      list(TRANSFORM caps REPLACE "\\." "")
      list(REMOVE_DUPLICATES caps)
      list(TRANSFORM caps REPLACE "^90$" "90a")
      set(archs "${caps}")
    endif()
  endif()
  if(NOT archs)
    set(archs "80-real;86-real;89-real;90a-real;90-virtual")
  endif()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Warnings, and arithmetic that means what it says: no contraction, no fast-math. The .cu side says the same.
function(_ts_compile_options target)
  target_include_directories(${target} PRIVATE "${TS_CORE_INCLUDE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-O3;-Wall;-Wextra;-ffp-contract=off>
    $<$<COMPILE_LANGUAGE:CUDA>:-O3;--fmad=false;-lineinfo;--expt-relaxed-constexpr;-Xcompiler=-Wall,-ffp-contract=off>)
  if(TS_HAVE_CUDA)
    target_compile_definitions(${target} PRIVATE TS_WITH_CUDA=1)
    target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  endif()
endfunction()

function(ts_add_module name package)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "" "BINDINGS;ISA_SOURCES;CPU_SOURCES;CUDA_SOURCES")

  nanobind_add_module(${name} NOMINSIZE BACKEND_MODULE nanobind_backend NB_SUPPRESS_WARNINGS
    ${ARG_BINDINGS} ${ARG_CPU_SOURCES})
  _ts_compile_options(${name})
  target_link_libraries(${name} PRIVATE pthread)

  if(ARG_ISA_SOURCES)
    set(variants portable)
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
      list(APPEND variants avx2 avx512)
    endif()
    set(flags_portable "")
    set(flags_avx2 -mavx2 -mfma -mf16c)
    set(flags_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq)
    foreach(variant IN LISTS variants)
      add_library(${name}_${variant} OBJECT ${ARG_ISA_SOURCES})
      _ts_compile_options(${name}_${variant})
      # GCC 12's own AVX-512 headers trip its warning about uninitialised values.
      target_compile_options(${name}_${variant} PRIVATE ${flags_${variant}} $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
      target_compile_definitions(${name}_${variant} PRIVATE TS_ISA=${variant} TS_ISA_${variant}=1)
      target_sources(${name} PRIVATE $<TARGET_OBJECTS:${name}_${variant}>)
    endforeach()
  endif()

  if(TS_HAVE_CUDA AND ARG_CUDA_SOURCES)
    add_library(${name}_cuda OBJECT ${ARG_CUDA_SOURCES})
    _ts_compile_options(${name}_cuda)
    set_target_properties(${name}_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:${name}_cuda>)
  endif()
  if(TS_HAVE_CUDA)
    set_target_properties(${name} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
    # Static cudart: the module loads on machines without a driver and needs no libcudart beside it.
    target_link_libraries(${name} PRIVATE CUDA::cudart_static)
  endif()
  install(TARGETS ${name} LIBRARY DESTINATION ${package})
endfunction()
