"""What several methods share; what one method alone needs lies in that method's file or package."""
