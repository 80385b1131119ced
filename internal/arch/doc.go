// Package arch holds no code: its tests say which package may import what, and
// why, and fail with that reason.
package arch
