"""Products in 8 bits with one scale per block: conversion of numbers to 8 bits, and linear maps computed in them."""
